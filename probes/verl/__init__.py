"""The probe and the masks as a plugin of verl.

Importing this package is what loads the plugin: verl does it by the entry point
`verl.plugins`, or where `VERL_USE_EXTERNAL_MODULES=deltad.probes.verl` is set. What it does is
told by the variables of `Settings`; `python -m deltad.probes.verl` says whether it is loaded.
"""

from .plugin import install, uninstall
from .policy_losses import LOSSES
from .settings import Settings

__all__ = ["LOSSES", "Settings", "install", "uninstall"]

install()
