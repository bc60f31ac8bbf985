"""What importing the plugin changes in verl, on stand-ins of verl's modules and on verl itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deltad.probes import ProbeError
from deltad.probes.verl import plugin
from deltad.probes.verl.plugin import is_wrapped, wrap_engines
from tests.probes.verl.verl_here import imported

ROOT = Path(__file__).parents[3]


def engines() -> Any:
    """A module like `verl.workers.engine.base`."""
    module: Any = ModuleType("engines")

    class BaseEngine:
        engine_config = SimpleNamespace(strategy="fsdp2")
        model_config = SimpleNamespace(model_type="language_model")

        def train_batch(self, data: Any, loss_function: Any) -> Any:
            """Train."""
            return "trained", data, loss_function

        def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
            raise AssertionError("nothing is read")

    module.BaseEngine = BaseEngine
    return module


def test_every_engine_is_wrapped_once() -> None:
    module = engines()
    original = module.BaseEngine.train_batch
    assert not is_wrapped(module)
    wrap_engines(module)
    wrapper = module.BaseEngine.train_batch
    assert wrapper is not original
    assert wrapper.__doc__ == "Train."
    wrap_engines(module)
    assert module.BaseEngine.train_batch is wrapper


def test_what_is_no_policy_goes_to_the_engine_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAD_VERL_RUN", raising=False)
    module = engines()
    wrap_engines(module)
    batch, loss = {"input_ids": 1, "responses": 2}, object()
    assert module.BaseEngine().train_batch(batch, loss_function=loss) == ("trained", batch, loss)
    critic = module.BaseEngine()
    critic.model_config = SimpleNamespace(model_type="value_model")
    names = ("input_ids", "responses", "response_mask", "advantages", "old_log_probs")
    batch = dict.fromkeys(names, 0)
    assert critic.train_batch(batch, loss) == ("trained", batch, loss)


def test_a_wrong_variable_stops_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAD_VERL_EVRY", "2")
    module = engines()
    wrap_engines(module)
    with pytest.raises(ProbeError, match="no environment variable DELTAD_VERL_EVRY"):
        module.BaseEngine().train_batch({}, None)


def test_a_verl_of_another_shape_is_refused() -> None:
    module = engines()
    del module.BaseEngine.infer_batch
    with pytest.raises(ProbeError, match=r"BaseEngine has no infer_batch: .*knows verl 0.9"):
        wrap_engines(module)
    with pytest.raises(ProbeError, match="has no train_batch and no infer_batch"):
        wrap_engines(ModuleType("empty"))


def test_the_wrapper_can_be_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    module = engines()
    original = module.BaseEngine.train_batch
    wrap_engines(module)
    monkeypatch.setitem(sys.modules, plugin.ENGINES, module)
    plugin.uninstall()
    assert module.BaseEngine.train_batch is original


def run_status(**variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m deltad.probes.verl`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "deltad.probes.verl"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.verl
def test_a_worker_of_verl_has_the_plugin() -> None:
    imported("verl")
    loaded = run_status(VERL_USE_EXTERNAL_MODULES="deltad.probes.verl", DELTAD_VERL_RUN="here")
    assert loaded.returncode == 0, loaded.stdout + loaded.stderr
    assert loaded.stdout.startswith("the plugin is loaded\n  verl 0.")
    assert "records to: here\n" in loaded.stdout
    assert "training engines are watched\n" in loaded.stdout
    assert "predictive_kl" in loaded.stdout


@pytest.mark.verl
def test_why_it_is_not_loaded_is_said() -> None:
    imported("verl")
    for variables, reason in (
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, ("passes the entry point over", "no entry point")),
        (
            {"VERL_USE_EXTERNAL_MODULES": "deltad.probes.verl", "DELTAD_VERL_TOPK": "0"},
            ("DELTAD_VERL_TOPK must be an integer of at least 1",),
        ),
    ):
        refused = run_status(**variables)
        assert refused.returncode == 1
        assert refused.stdout.startswith("the plugin is NOT loaded\n")
        assert any(each in refused.stdout for each in reason), refused.stdout


@pytest.mark.verl
def test_verl_imports_the_plugin_and_no_engine_for_it() -> None:
    """In a process that only imports verl."""
    imported("verl")
    program = (
        "import sys, verl; print('deltad.probes.verl' in sys.modules, "
        "'verl.workers.engine' in sys.modules, 'verl.trainer.ppo.core_algos' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_MODULES": "deltad.probes.verl"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    assert done.stdout.split() == ["True", "False", "False"]
