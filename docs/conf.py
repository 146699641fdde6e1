"""Sphinx configuration; the source directory is the repository's root: ``sphinx-build -W -n -c docs . .site``."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

# Tutorials run without a GPU wherever they are built, so that the pages are the same everywhere. They run in kernels
# of their own, which take both settings from the environment.
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # the kernel's debugger warns about frozen modules

# Kernels of their own profile: they neither read the user's settings nor warn that they talk over local TCP.
profile = Path(tempfile.mkdtemp(prefix="ddtree-ipython-"), "profile_default")
profile.mkdir()
(profile / "ipython_kernel_config.py").write_text("c = get_config()\nc.IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(profile.parent)
atexit.register(shutil.rmtree, profile.parent, ignore_errors=True)
logging.getLogger("traitlets").setLevel(logging.WARNING)

project = "ddtree_numba"
author = "the ddtree_numba contributors"
version = release = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
root_doc = "docs/index"
include_patterns = ["docs/**", "tutorials/**"]
exclude_patterns = ["docs/_*/**", "**/.ipynb_checkpoints/**"]

extensions = [
    "sphinx.ext.autodoc",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "measured",
    "notebooks",
    "source_of",
]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False
suppress_warnings = ["mystnb.unknown_mime_type"]

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60  # of a cell, as in tests/test_tutorials.py
nb_execution_show_tb = True
nb_merge_streams = True

default_role = "literal"  # docstrings put names in single backticks
autodoc_typehints = "none"  # shapes and dtypes stand in the text; `Any` would say nothing
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "both"
add_module_names = False
nitpick_ignore = [("py:class", "NamedTuple"), ("py:class", "object"), ("py:class", "tuple")]
nitpick_ignore_regex = [("py:class", r"(numpy|np|collections\.abc|typing|pathlib)\..*")]  # other projects' names

html_theme = "furo"
html_title = "ddtree_numba"
html_math_renderer = "mathml"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["ddtree.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
html_show_copyright = False
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
