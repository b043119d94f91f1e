"""What would keep a crash of a server from being recorded: facts are gathered, and pure rules make findings of them."""
