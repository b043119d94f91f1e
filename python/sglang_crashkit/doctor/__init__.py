"""Find what would keep a server's crash from being recorded."""
