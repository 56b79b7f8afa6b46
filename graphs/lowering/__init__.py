"""What a step becomes on a GPU, told on a machine without one: lowered for a pretended device, assembled, examined.

`examine.examine` is the way in; `python -m hybrid_runtime.lowering_report` applies it to the steps of whole models.
"""
