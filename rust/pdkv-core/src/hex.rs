//! Lowercase hexadecimal, the form in which ids and digests appear in references and messages.

/// Writes two digits a byte.
pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for &byte in bytes {
        text.push(DIGITS[usize::from(byte >> 4)] as char);
        text.push(DIGITS[usize::from(byte & 15)] as char);
    }
    text
}

/// Reads what [`encode`] writes; `None` for an odd length or any other character.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| {
        (c as char)
            .to_digit(16)
            .filter(|_| !c.is_ascii_uppercase())
            .map(|d| d as u8)
    };
    let bytes = text.as_bytes();
    if !bytes.len().is_multiple_of(2) {
        return None;
    }
    bytes
        .chunks_exact(2)
        .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusals() {
        assert_eq!(decode(&encode(&[0, 15, 16, 255])), Some(vec![0, 15, 16, 255]));
        for bad in ["0", "0g", "0A", "é0"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
