"""Put the kit's patches into an installed SGLang, take them out, and build patched wheels, without importing SGLang."""
