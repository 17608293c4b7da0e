"""Python imports this by itself in every process whose PYTHONPATH has this folder: the engine's workers too."""

from __future__ import annotations

import patient_waits  # noqa: F401  # imported for what it changes
