"""The optional native library and its readable numpy twin; importing this loads nothing."""
