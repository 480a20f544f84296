"""The HTTP stack that servers share: who may ask, connections bounded in number and time, a server on a thread.

It does not import torch; its libraries are in the extra ``control``.
"""
