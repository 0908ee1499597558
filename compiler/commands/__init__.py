"""The work of each command of `octavo`. compiler/cli.py holds their options and imports one when it runs."""
