//! What both ends of a lane of active messages have in common: one message carries the payload of one
//! request and is headed by the request's number, nothing else.

use pdkv_ucx::Delivery;

/// Payload that one message is made for. A single unit may be larger.
pub(super) const MESSAGE_BYTES: u64 = 1 << 20;

/// Payload up to this size travels with its header: cheaper than being fetched, and held by UCX at the
/// receiver until it is placed.
const EAGER_BYTES: u64 = 8 << 10;

/// The header of a message for this request.
pub(super) fn header(id: u64) -> [u8; 8] {
    id.to_le_bytes()
}

/// The request that a header names; `None` for anything else, the hello included.
pub(super) fn id_of(header: &[u8]) -> Option<u64> {
    let id = u64::from_le_bytes(header.try_into().ok()?);
    (id != 0).then_some(id)
}

/// How a payload of this size travels.
pub(super) fn delivery(bytes: u64) -> Delivery {
    if bytes <= EAGER_BYTES {
        Delivery::Eager
    } else {
        Delivery::Rendezvous
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_eight_bytes_that_are_not_the_hello_name_a_request() {
        assert_eq!(id_of(&header(7)), Some(7));
        for header in [&super::super::door::HELLO[..], b"", b"seven b", b"nine byte"] {
            assert_eq!(id_of(header), None, "{header:?}");
        }
    }
}
