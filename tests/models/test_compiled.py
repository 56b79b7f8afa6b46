"""A decode step is one graph: no break, no wait for the device, pools mutated as graph inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from tests.parity.driver import Driver, Prompt
from tests.parity.zoo import CASES, FULL, LINEAR, Case


@pytest.mark.parametrize("name", ["kimi", "granite-moe-rope", "qwen"])
def test_decode_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, one of each kind. Traced but not lowered: what is tested is the code, not the compiler."""
    full = next(case for case in CASES if case.name == name)
    case = Case(name, full.config_class, {**full.options, "num_hidden_layers": 2, "layer_types": [FULL, LINEAR]})
    model = adapt(case.build())
    expected = decode_twice(model)
    eager = model.decode
    torch.compiler.reset()
    compiled = torch.compile(eager, fullgraph=True, dynamic=False, backend="eager")
    calls = iter((compiled, eager))  # the eager step reads what the compiled one left in the pools
    monkeypatch.setattr(model, "decode", lambda inputs, memory: next(calls)(inputs, memory))
    torch.testing.assert_close(decode_twice(model), expected, rtol=0, atol=0)


def decode_twice(model: HybridModel) -> Tensor:
    driver = Driver(model, max_requests=2, max_len=8, num_state_slots=2)
    requests = [driver.start(), driver.start()]
    driver.prefill(Prompt(requests[0], [3, 4]), Prompt(requests[1], [5]))
    return torch.cat([driver.decode(requests, [6, 7]), driver.decode(requests, [8, 9])])
