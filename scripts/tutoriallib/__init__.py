"""The tutorials: real troubles of real servers, and the pages that show what the kit says of them."""
