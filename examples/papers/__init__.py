"""The experiments of the papers: docs/papers.md."""
