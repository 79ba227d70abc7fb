"""What the census takes of tasks for which a type's name is no batch: a table of entries each."""
