"""Sphinx configuration."""

import os
import shutil
from pathlib import Path

project = "numpyro_fed"
author = "the numpyro_fed authors"
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "numpyro_fed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["nvflare"]  # an extra that the documentation is built without

# The notebooks live in examples/, are copied beside the pages, and run as the site is built: an error in one is an
# error of the build. Those whose data are not here are shown without results.
pages = Path(__file__).parent / "notebooks"
notebooks = [path for path in Path(__file__).parents[1].glob("examples/*.md") if "kernelspec" in path.read_text()]
for path in notebooks:
    shutil.copy2(path, pages)
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # of the kernels: tqdm misses ipywidgets
nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds a cell
nb_execution_excludepatterns = [
    f"notebooks/{path.name}"
    for path in notebooks
    if "NUMPYRO_FED_DATA" in path.read_text() and not os.environ.get("NUMPYRO_FED_DATA")
]
nb_merge_streams = True
