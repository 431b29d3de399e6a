"""Silos in processes of their own: the server and each silo see nothing of each other but bytes.

Both ends have the same study file (model, shared arguments, methods); no code crosses, and nothing is unpickled. A silo
is a function of bytes, :meth:`numpyro_fed.remote.site.Site.handle`; a server asks through a
:class:`numpyro_fed.remote.transport.Transport`. Between them:

======================  =========================================================================================
``envelope``            one message: who, to whom, of which study, run and software; its payload in the wire codec
``signing``             messages as files, signed; keys pinned
``policy``              what the owner of a silo allows
``audit``               what left a silo, line by line
``site``, ``post``      the two guarded ends: every message is checked before anything is done with it
``transport``           how bytes get from one end to the other
``sockets``             over TCP; one connection is a ``links.Link``
``files``               by signed files that somebody carries
``study``, ``tables``   what both ends know, and a silo's table as arguments of the model
``config``, ``cli``     what a machine is told by a file of its own, and the command ``numpyro-fed``
``own``                 the fit in a silo, for draws of its own latents
======================  =========================================================================================
"""

from numpyro_fed.remote.engine import RemoteError
from numpyro_fed.remote.files import Files
from numpyro_fed.remote.own import own_fit
from numpyro_fed.remote.policy import Policy
from numpyro_fed.remote.silos import DataElsewhere, RemoteSilos, connect
from numpyro_fed.remote.site import Site
from numpyro_fed.remote.sockets import Sockets, serve
from numpyro_fed.remote.study import Study
from numpyro_fed.remote.transport import Direct, Failure, Transport
from numpyro_fed.remote.worker import Worker

__all__ = [
    "DataElsewhere",
    "Direct",
    "Failure",
    "Files",
    "Policy",
    "RemoteError",
    "RemoteSilos",
    "Site",
    "Sockets",
    "Study",
    "Transport",
    "Worker",
    "connect",
    "own_fit",
    "serve",
]
