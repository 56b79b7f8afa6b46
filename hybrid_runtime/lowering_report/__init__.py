"""The lowering report of the supported architectures: `python -m hybrid_runtime.lowering_report`."""
