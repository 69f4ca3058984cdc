"""What is told of reuse once a model is loaded, before anybody asks."""

from sidecar.infra.counters import HEALTHY_AT_ZERO
from sidecar.service.served_model import ServedModel


def start_line(served: ServedModel) -> str:
    """
    How this model reuses, how its tests went, and the counters that should stay 0.

    Their values are those after the load: what has moved already says that something
    is wrong with this model.
    """
    engine, counters = served.engine, served.counters()
    layers = [(k.replace(" ", ""), n) for k, n in engine.store.layers.items()]
    tests = ",".join(f"{name}:{outcome}" for name, outcome in engine.selftest.items())
    told = {
        "layers": ",".join(f"{n}x{kind}" for kind, n in layers),
        "checkpoints": "needed" if engine.store.needs_checkpoints else "not-needed",
        "splicing": "on" if served.pipeline.can_splice else "off",
        "selftest": tests or "-",
        **{name: counters[name] for name in HEALTHY_AT_ZERO},
    }
    return " ".join(f"{name}={value}" for name, value in told.items())
