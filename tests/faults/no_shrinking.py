"""A pytest plugin for runs that only ask whether a property test fails: no time goes into a small example."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

PROFILE = "no_shrinking"

settings.register_profile(
    PROFILE,
    max_examples=50,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
