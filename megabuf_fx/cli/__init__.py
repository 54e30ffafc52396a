"""The command line ``megabuf``. Only this room prints."""
