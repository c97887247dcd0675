"""The site: ``make docs`` builds it, and takes every warning for an error."""

import lightning_sdpipe

project = "lightning-sdpipe"
author = "The authors of lightning-sdpipe"
release = version = lightning_sdpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "faults"]
html_theme = "furo"
html_title = f"lightning-sdpipe {version}"

myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # transcripts of a terminal are marked as bash

autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
