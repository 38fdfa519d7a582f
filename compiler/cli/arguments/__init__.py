"""The arguments of the commands, declared for typer. These modules import little, so that help is quick."""
