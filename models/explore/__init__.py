"""Exhaustive exploration: every state of the abstract machine within stated bounds.

``scope.py`` what is possible in a small world · ``encoding.py`` one state as bytes, blocks and requests without their
names · ``search.py`` breadth first, with the shortest way to whatever breaks · ``liveness.py`` from where nothing comes
of a request any more · ``scopes.py`` the worlds that are explored.
"""
