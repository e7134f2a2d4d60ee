"""Faces of other projects' releases, on pdkv. Nothing here is imported by `import pdkv`."""
