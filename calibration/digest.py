"""One short text that two runs share if the same was asked of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(content: Any) -> str:
    """SHA-256 of the content as JSON, the keys of mappings in order of the alphabet."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_inputs(manifest: Mapping[str, Any]) -> str:
    """What a run was given: its resolved settings, seed included, the files of the pair, the prompts, and the
    program's version. Neither the machine nor what was measured on it counts."""
    identity = manifest["identity"]
    return digest(
        {
            "version": manifest["version"],
            "settings": manifest["settings"],
            "pair": [identity.get("pair"), identity.get("sha256")],
            "workload": manifest["workload"],
            "calibration": manifest.get("calibration", {}).get("prompts"),  # of a profile, `workload` has them
        }
    )
