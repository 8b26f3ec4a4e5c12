from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True, scope="session")
def freeze_imports() -> Iterator[None]:
    """Every run of a Trainer ends with a garbage collection, which takes longer than the run if it looks at all that is
    imported: it looks at what came afterwards alone."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def small_models(one_thread: None) -> None:
    """All models here are small: one thread is fastest."""


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """The package accelerate remembers the precision of the first trainer of a process, in its state and in the
    environment: every trainer begins without the last one's."""
    with patch.dict(os.environ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
