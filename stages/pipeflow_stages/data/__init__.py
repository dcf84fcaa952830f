"""Records in and out of files."""
