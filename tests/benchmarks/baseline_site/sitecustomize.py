"""Lets vLLM's own MooncakeConnector start on a machine without an accelerator (baseline processes only).

It asks `torch.accelerator.current_device_index()` for a device that it then does not use over TCP.
Put this folder on PYTHONPATH of the baseline's engine and of nothing else.
"""

from __future__ import annotations

import patient_waits  # noqa: F401  # from examples/engine_site, as in every engine of the harness
import torch

torch.accelerator.current_device_index = lambda: 0
