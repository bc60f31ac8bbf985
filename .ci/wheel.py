"""Import every module of the installed wheel; run where no checkout of deltad is near."""

import importlib
import pathlib
import pkgutil

import deltad

installed = pathlib.Path(deltad.__file__).parent
assert installed.parent.name == "installed", installed
assert (installed / "py.typed").exists()
names = [module.name for module in pkgutil.walk_packages(deltad.__path__, "deltad.")]
for name in names:
    importlib.import_module(name)
assert {"deltad.analysis", "deltad.probes", "deltad.probes.recipes"} <= set(names), names
print(f"{len(names)} modules import from the wheel")
