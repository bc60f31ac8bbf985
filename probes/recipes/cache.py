"""Folders in the user's cache, named by a hash of what they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .recipe import RecipeError

CACHE_VARIABLE = "DELTAD_CACHE"
"""Environment variable that names another cache folder."""

KEY_FILE = "key.json"
"""What a folder was made from, for people who look into the cache."""


def cache_root() -> Path:
    """Folder of deltad's cache: `DELTAD_CACHE`, else where the platform keeps such things."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "deltad"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "deltad"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "deltad" / "Cache"
    return Path.home() / ".cache" / "deltad"


def cached_folder(kind: str, key: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Give the folder made from `key`, building it where it is not there yet.

    Parameters
    ----------
    kind
        Sub-folder of the cache.
    key
        All that the content depends on, as JSON values.
    build
        Fills an empty folder.

    Returns
    -------
    Path
        The folder; it appears whole or not at all, also where several processes build it at
        once: the first wins.

    Raises
    ------
    RecipeError
        The cache cannot be written.
    """
    text = json.dumps(key, sort_keys=True)
    folder = cache_root() / kind / hashlib.sha256(text.encode()).hexdigest()[:20]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise RecipeError(
            f"the cache folder {cache_root()} cannot be written ({error.strerror or error}): "
            f"name another by {CACHE_VARIABLE}"
        ) from error
    try:
        build(aside)
        (aside / KEY_FILE).write_text(text + "\n", encoding="utf-8")
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
