"""What to change where nothing fits, or what other devices would do."""
