//! Decoders under bytes that anybody may have written: what is read comes back the same from its own encoding, and
//! all else is a typed error.

use pdkv_core::error::{Error, ErrorKind};
use pdkv_core::issuer::Issuer;
use pdkv_core::pipe::{ToReceiver, ToSender};
use pdkv_core::reference::Reference;
use pdkv_core::wire::{FrameDecoder, HELLO_CAP, Message, encode};

/// Any bytes, in pieces. What decodes must come back the same from its own encoding.
pub fn frames(data: &[u8]) {
    let Some((&piece, stream)) = data.split_first() else {
        return;
    };
    let mut decoder = FrameDecoder::new(HELLO_CAP);
    for chunk in stream.chunks(usize::from(piece) + 1) {
        decoder.push(chunk);
        loop {
            match decoder.next() {
                Ok(Some(message)) => same_again(&message),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Handshake);
                    assert!(decoder.next().is_err(), "a lost stream stays lost");
                    assert_eq!(decoder.pending(), 0);
                    return;
                }
            }
        }
    }
}

/// Any bytes, as either end of a pipe would take them. What is read must come back the same from its own encoding.
pub fn pipe(data: &[u8]) {
    let mut rest = data;
    while let Some((frame, used)) = only_integrity(ToReceiver::decode(rest)) {
        let mut again = Vec::new();
        frame.encode(&mut again).expect("what came in a frame fits one");
        assert_eq!(only_integrity(ToReceiver::decode(&again)), Some((frame, used)));
        rest = &rest[used..];
    }
    rest = data;
    while let Some((frame, used)) = only_integrity(ToSender::decode(rest)) {
        let mut again = Vec::new();
        frame.encode(&mut again);
        assert_eq!(only_integrity(ToSender::decode(&again)), Some((frame, used)));
        rest = &rest[used..];
    }
}

fn only_integrity<T>(decoded: Result<Option<T>, Error>) -> Option<T> {
    decoded.unwrap_or_else(|error| {
        assert_eq!(error.kind(), ErrorKind::Integrity);
        None
    })
}

fn same_again(message: &Message) {
    let mut decoder = FrameDecoder::new(HELLO_CAP);
    decoder.push(&encode(message).expect("what came in a frame fits one"));
    let again = decoder.next().expect("our own encoding").expect("whole");
    assert_eq!(&again, message);
}

/// Any bytes. What is read must come back as the same bytes.
pub fn issuer(data: &[u8]) {
    match Issuer::from_bytes(data) {
        Ok(issuer) => assert_eq!(issuer.to_bytes(), data),
        Err(error) => {
            let expected = [ErrorKind::Config, ErrorKind::Unsupported];
            assert!(expected.contains(&error.kind()), "{error:?}");
        }
    }
}

/// Any text. What is read must come back the same from its own text.
pub fn reference_json(text: &str) {
    match Reference::from_json(text) {
        Ok(reference) => assert_eq!(
            Reference::from_json(&reference.to_json()).expect("our own text"),
            reference
        ),
        Err(error) => {
            let expected = [ErrorKind::Config, ErrorKind::ReferenceForged, ErrorKind::Unsupported];
            assert!(expected.contains(&error.kind()), "{error:?}");
        }
    }
}
