"""A corpus of spellings: things that models do, each as people write it in five ways."""
