//! The sending half of one peer's control channel: frames out without blocking, in order. The other
//! half is in `reader.rs`.

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
        if self.sent > self.pending.len() / 2 {
            // A peer that reads steadily but never all of it would let the sent part grow for ever.
            self.pending.drain(..self.sent);
            self.sent = 0;
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

#[cfg(test)]
mod tests {
    use super::*;
    use pdkv_core::wire::Notify;
    use std::io::Read;

    #[test]
    fn what_is_sent_is_not_kept_for_a_reader_that_lags() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        ours.set_nonblocking(true).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let mut channel = Channel::new(Arc::new(TcpStream::from_std(ours)));
        let message = Message::Notify(Notify {
            bytes: vec![7; 1 << 20],
        });
        let lag = 8 << 20;
        let mut scrap = vec![0; 1 << 20];
        for _ in 0..150 {
            channel.send(&message).unwrap();
            while channel.pending.len() - channel.sent > lag {
                theirs.read_exact(&mut scrap).unwrap();
                channel.flush().unwrap();
            }
        }
        assert!(channel.is_blocked(), "the reader never caught up");
        assert!(
            channel.pending.len() < 4 * lag,
            "{} bytes are kept",
            channel.pending.len()
        );
    }
}
