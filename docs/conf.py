"""The site: `make docs`. Pages are Markdown; the API is drawn from the docstrings of the package that is installed."""

import fastconv

project = "fastconv"
version = release = fastconv.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "fastconv"

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["myst.header"]  # an experiment's headings begin where they did when it was written

default_role = "code"
add_module_names = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
