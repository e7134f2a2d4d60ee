"""House rules as tests: what a reviewer would otherwise have to look for by hand."""
