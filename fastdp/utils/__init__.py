"""Small tools without a notion of privacy: text, caches, pytrees, random states, append-only files."""
