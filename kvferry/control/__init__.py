"""The control channel: messages, handshake, leases, tickets. Importing it loads no sockets."""
