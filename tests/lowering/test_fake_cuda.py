"""The pretended device is put away again, and is refused where torch has changed."""

from __future__ import annotations

from tests.lowering.processes import must_run

SCRIPT = """
import ctypes, os
from pathlib import Path
import torch
from torch._dynamo import device_interface
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.driver import driver
from hybrid_runtime.graphs.lowering.fake_cuda import UnsupportedVersionError, pretend_cuda
import hybrid_runtime.lowering_report.run

registry = (ctypes.c_void_p * 8).in_dll(
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
)
dict(device_interface.get_registered_device_interfaces())

def state():
    return {
        "interfaces": dict(device_interface.device_interfaces),
        "properties": torch.cuda.get_device_properties,
        "guard": registry[1],
        "folder": [vars(Folder)[name] for name in ("_deduce_value", "_add_peephole_patterns")],
        "is_active": vars(CudaDriver)["is_active"],
        "drivers": (driver._default, driver._active),
        "environment": dict(os.environ),
    }

before = state()
assert before["interfaces"]["cuda"] is device_interface.CudaInterface
with pretend_cuda() as replaced:
    during = state()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        torch.zeros(3, device="cuda")[1]
assert {name for name in before if before[name] != during[name]} == set(before), "something was not replaced"
assert len(replaced) == 8, replaced
after = state()
assert after == before, {name for name in before if before[name] != after[name]}
try:
    with pretend_cuda():
        raise KeyError("of the caller")
except KeyError:
    assert state() == before
get_device_properties = torch.cuda.get_device_properties
del torch.cuda.get_device_properties
try:
    with pretend_cuda():
        pass
except UnsupportedVersionError as error:
    print(error)
torch.cuda.get_device_properties = get_device_properties
assert state() == before, "what was replaced before the missing name was met stays"
"""


def test_everything_that_is_replaced_is_put_back():
    """After use, after an error of the caller, and where a name to replace is missing; importing replaces nothing."""
    assert "has no torch.cuda.get_device_properties" in must_run("-c", SCRIPT)
