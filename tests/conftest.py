"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: two cores are shared with engines. On CI the same examples every time; a failure prints how to repeat it.
settings.register_profile("project", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("project")
