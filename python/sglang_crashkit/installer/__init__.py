"""Apply the kit's patches to an installed SGLang, revert them, and build patched wheels, without importing SGLang."""
