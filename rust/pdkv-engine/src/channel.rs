//! The control channel of one peer: frames out without blocking, in order. Frames in are read by
//! the progress thread alone.

use std::io::{ErrorKind as IoKind, Write};
use std::net::Shutdown;
use std::sync::Arc;

use mio::net::TcpStream;
use pdkv_core::wire::{self, Message};
use pdkv_core::{Error, ErrorKind, Result};

/// What may wait for a peer that reads slowly; past it the peer counts as lost.
const MAX_PENDING: usize = 128 << 20;

pub(crate) struct Channel {
    stream: Arc<TcpStream>,
    pending: Vec<u8>,
    /// Bytes of `pending` that are sent already.
    sent: usize,
}

impl Channel {
    pub(crate) fn new(stream: Arc<TcpStream>) -> Self {
        Self {
            stream,
            pending: Vec::new(),
            sent: 0,
        }
    }

    /// Sends a message, or queues what the socket doesn't take now.
    pub(crate) fn send(&mut self, message: &Message) -> Result<()> {
        let frame = wire::encode(message)?;
        if self.pending.len() - self.sent + frame.len() > MAX_PENDING {
            return Err(Error::new(
                ErrorKind::PeerLost,
                "control channel",
                "the peer has stopped reading",
            ));
        }
        if self.pending.is_empty() {
            let written = self.write(&frame)?;
            self.pending.extend_from_slice(&frame[written..]);
            return Ok(());
        }
        self.pending.extend_from_slice(&frame);
        self.flush()
    }

    /// Whether something waits for the socket.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Sends what is queued, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let written = self.write(&self.pending[self.sent..])?;
        self.sent += written;
        if self.sent == self.pending.len() {
            self.pending.clear();
            self.sent = 0;
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> Result<usize> {
        let mut written = 0;
        while written < bytes.len() {
            match (&*self.stream).write(&bytes[written..]) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if error.kind() == IoKind::WouldBlock => break,
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => {
                    return Err(Error::new(
                        ErrorKind::PeerLost,
                        "control channel",
                        "the connection to the peer broke",
                    )
                    .with_source(error));
                }
            }
        }
        Ok(written)
    }

    /// Tells the peer at once that this is over.
    pub(crate) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
