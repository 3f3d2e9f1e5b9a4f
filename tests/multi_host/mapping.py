"""Ports that lead elsewhere, as those of a NAT: each LISTEN:HOST:PORT of the arguments."""

import asyncio
import sys


async def copy(reader, writer):
    """One direction of a connection, to its end."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def lead(port, host, to):
    """Has a port of this host lead to one of another."""

    async def carry(reader, writer):
        try:
            inside, out = await asyncio.open_connection(host, to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, out), copy(inside, writer))

    server = await asyncio.start_server(carry, "0.0.0.0", port)  # a host of the test's own
    await server.serve_forever()


async def main():
    """Serves every mapping."""
    places = [argument.split(":") for argument in sys.argv[1:]]
    await asyncio.gather(*(lead(int(port), host, int(to)) for port, host, to in places))


if __name__ == "__main__":
    asyncio.run(main())
