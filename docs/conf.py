"""Sphinx configuration."""

project = "numpyro_fed"
author = "the numpyro_fed authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
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
