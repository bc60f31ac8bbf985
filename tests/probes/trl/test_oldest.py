"""The central laws once more, in an environment with the oldest TRL that is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.probes.trl import laws
from tests.probes.trl.test_attach import (
    stale as stale,
)
from tests.probes.trl.test_attach import (
    test_a_policy_that_has_not_moved_has_no_divergence as test_a_policy_that_has_not_moved_has_no_divergence,
)
from tests.probes.trl.test_attach import (
    test_a_stale_step_begins_where_the_last_ended as test_a_stale_step_begins_where_the_last_ended,
)
from tests.probes.trl.test_attach import (
    test_logs_and_weights_are_those_without_the_probe as test_logs_and_weights_are_those_without_the_probe,
)
from tests.probes.trl.test_attach import (
    test_rows_are_those_of_a_forward_of_our_own as test_rows_are_those_of_a_forward_of_our_own,
)
from tests.probes.trl.test_settings import lora

pytestmark = pytest.mark.trl18


def test_lora_on_the_head_too(tmp_path: Path) -> None:
    """Newer versions refuse it themselves."""
    found = laws.pair(
        tmp_path,
        peft=lora("q_proj", "lm_head"),
        policy=None,
        num_iterations=2,
        learning_rate=5e-2,
    )
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, (0, 2))
    laws.a_stale_step_begins_where_the_last_ended(found, 0)
    laws.the_dump_is_in_order(found.run)
