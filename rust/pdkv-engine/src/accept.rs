//! What a new connection turns out to be: a peer's control channel, or one of its data streams.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mio::net::TcpStream;
use pdkv_core::id::PeerKey;
use pdkv_core::node::Role;
use pdkv_core::session::{self, features};
use pdkv_core::wire::{FrameDecoder, Hello, MAX_FRAME, Message, StreamHello, StreamPurpose};
use pdkv_core::{Error, ErrorKind, Result};

use crate::channel::Channel;
use crate::connect::{fresh_token, hello_of};
use crate::dial::{STREAM_FULL, STREAM_READY};
use crate::pipe;
use crate::reader::Reader;
use crate::shared::{PeerEntry, Shared};
use crate::suspect::{self, Writer};
use crate::transport::tcp::{Greeting, Socket, serve_stream};
use crate::transport::ucx;

pub(crate) enum Welcome {
    /// A control channel, now known to the engine.
    Peer(Arc<Reader>),
    /// A data stream, now served by a thread of its own.
    Stream,
}

/// Judges the first frame of a connection.
pub(crate) fn welcome(
    shared: &Arc<Shared>,
    stream: TcpStream,
    mut decoder: FrameDecoder,
    first: Message,
) -> Result<Welcome> {
    match first {
        Message::Hello(hello) => {
            decoder.set_cap(MAX_FRAME);
            greet(shared, Arc::new(stream), decoder, *hello).map(Welcome::Peer)
        }
        Message::StreamHello(hello) => join(shared, stream, &decoder, hello).map(|()| Welcome::Stream),
        other => Err(Error::new(
            ErrorKind::Handshake,
            "accept",
            format!("a connection began with `{}`", other.name()),
        )),
    }
}

fn greet(shared: &Arc<Shared>, stream: Arc<TcpStream>, decoder: FrameDecoder, hello: Hello) -> Result<Arc<Reader>> {
    let token = fresh_token()?;
    let (writer, same_host) = (Writer::behind(&hello), suspect::same_host(&hello));
    let key = shared.new_peer_key();
    let reader = Arc::new(Reader::new(key, Arc::clone(&stream), decoder));
    // The answer lists what is registered; whatever is registered later is advertised to the peers
    // that are entered here. Both happen under one lock, so nothing falls between.
    shared.drive(|state, now| {
        // A hello that came in while the engine was closing would never be said goodbye to.
        shared.check_open("accept")?;
        let mut channel = Channel::new(stream);
        match session::accept(&hello_of(shared), token, hello) {
            Ok((answer, established)) => {
                channel.send(&answer)?;
                let name = established.remote.name.clone();
                state.peers.insert(
                    key,
                    PeerEntry {
                        channel,
                        name,
                        token: Some(token),
                        link: None,
                        reader: Arc::clone(&reader),
                        writers: writer.into_iter().collect(),
                        same_host,
                        features: established.features,
                    },
                );
                state.node.peer_up(now, key, Role::Owner, established.remote_peer());
                Ok(reader)
            }
            Err((refusal, error)) => {
                channel.send(&refusal)?;
                Err(error)
            }
        }
    })
}

/// Whether a peer waits for an answer to each data stream that it opens, and understands a refusal.
pub(crate) fn hears_answers(shared: &Shared, peer: PeerKey) -> bool {
    let state = shared.lock();
    let entry = state.peers.get(&peer);
    entry.is_some_and(|entry| entry.features & features::STREAM_ANSWERS != 0)
}

fn join(shared: &Arc<Shared>, stream: TcpStream, decoder: &FrameDecoder, hello: StreamHello) -> Result<()> {
    let refuse = |why| Err(Error::new(ErrorKind::Handshake, "data stream", why));
    let Some(peer) = shared.peer_of_token(hello.token) else {
        return refuse("the token is of no session");
    };
    if decoder.pending() > 0 {
        return refuse("the stream sent more than its hello before it was answered");
    }
    let stream = std::net::TcpStream::from(stream);
    let hears_refusals = hears_answers(shared, peer);
    let say = |word: u8| (&stream).write_all(&[word]).map_err(broken);
    match hello.purpose {
        StreamPurpose::Data => {
            let greeting = Greeting {
                ready: true,
                full: hears_refusals,
            };
            serve_stream(shared, peer, Socket::new(OwnedFd::from(stream))?, greeting)
        }
        StreamPurpose::UcxLane => {
            let lane = stream.try_clone().map_err(broken)?;
            match ucx::serve(shared, peer, lane) {
                // Whoever answers on it waits for the initiator's first word, and that for this one.
                Ok(()) => say(STREAM_READY),
                Err(error) => {
                    if hears_refusals && error.kind() == ErrorKind::Capacity {
                        say(STREAM_FULL)?;
                    }
                    Err(error)
                }
            }
        }
        StreamPurpose::Pipe => {
            // Once its sender has the answer, the pipe counts as one that is coming.
            let seat = pipe::Seat::take(shared, peer);
            say(STREAM_READY)?;
            pipe::arrive(shared, seat, stream)
        }
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::PeerLost, "data stream", "the stream broke at its start").with_source(error)
}
