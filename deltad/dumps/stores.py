"""What stores behind URLs differ in, and one sentence for whatever goes wrong on the way there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .errors import first_line
from .storage import StorageError

PACKAGES: Final = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}
"""What fsspec needs for a protocol, for the sentence about a missing package."""

WHOLE: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")
"""Object stores: an upload appears whole or not at all, and there are no folders to make."""

REFUSES: Final = ("s3", "s3a", "gs", "gcs")
"""Stores whose uploads can be made on the condition that nothing is there."""


def filesystem_of(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Find the fsspec filesystem of a URL and its name there, contacting nobody.

    Parameters
    ----------
    url : str
        With a protocol.
    options : mapping
        Storage options.

    Returns
    -------
    fs : fsspec filesystem
        Made of the options.
    path : str
        What the URL is called there.

    Raises
    ------
    StorageError
        The URL names no place, fsspec or the package that it needs is missing, or no one knows
        the protocol.
    """
    protocol, _, rest = url.partition("://")
    if not rest.strip("/"):
        raise StorageError(f"{url} names no place: give a folder after `{protocol}://`")
    package = PACKAGES.get(protocol, "fsspec")
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        extra = "" if package in ("fsspec", "s3fs") else f" {package}"
        raise StorageError(
            f"{url} needs a package that is not installed ({first_line(error)}): "
            f"pip install 'deltad[remote]'{extra}"
        ) from error
    except Exception as error:  # each store's library has its own
        raise StorageError(f"{url} cannot be used ({first_line(error)})") from error
    return fs, str(path)


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Make one sentence, that names a URL, of whatever a store's library raises in the block.

    Raises
    ------
    FileNotFoundError, NotADirectoryError, FileExistsError
        As raised.
    StorageError
        For all else.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        said = first_line(error)
        raise type(error)(said if url in said else f"{url}: {said}") from error
    except StorageError:
        raise
    except PermissionError as error:
        raise StorageError(
            f"{url} may not be read or written with these credentials ({first_line(error)})"
        ) from error
    except Exception as error:  # each store's library has its own
        raise StorageError(f"{url} cannot be reached ({first_line(error)})") from error


def protocols(fs: Any) -> tuple[str, ...]:
    """Names of a filesystem's protocol."""
    found = fs.protocol
    return (found,) if isinstance(found, str) else tuple(found)
