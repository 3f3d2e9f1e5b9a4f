"""The control channel: messages, handshake, leases, tickets. Sockets load only when asked for."""
