"""What would keep a crash of a server from being told: facts are gathered, and pure rules make findings of them."""
