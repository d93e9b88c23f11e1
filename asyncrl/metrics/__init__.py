"""What is reported and to whom.  Stages never import this room, apart from the facts they offer and the timeline."""
