//! The axes of a KV tensor and their letters.

use super::refuse;
use crate::Result;

/// One axis of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// `K`: key, then value; always of size 2.
    Kv,
    /// `B`: blocks.
    Block,
    /// `H`: KV heads.
    Head,
    /// `N`: tokens in a block.
    Token,
    /// `C` (or `D`): the elements of one head and token, contiguous.
    Content,
}

impl Axis {
    /// The letter in an axes string.
    pub const fn letter(self) -> char {
        match self {
            Self::Kv => 'K',
            Self::Block => 'B',
            Self::Head => 'H',
            Self::Token => 'N',
            Self::Content => 'C',
        }
    }

    /// Reads axes as in `"BHNC"`: every letter at most once, `B` and `C` always there.
    ///
    /// # Errors
    /// `Layout` naming the letter that is unknown, doubled or missing.
    pub(super) fn parse_all(text: &str) -> Result<Vec<Self>> {
        let mut axes = Vec::new();
        for letter in text.chars() {
            let axis = match letter {
                'K' => Self::Kv,
                'B' => Self::Block,
                'H' => Self::Head,
                'N' => Self::Token,
                'C' | 'D' => Self::Content,
                _ => {
                    let error = refuse(format!("axes `{text}` have the unknown letter `{letter}`"));
                    return Err(error.with_hint(if letter == 'L' {
                        "pass one tensor per layer and leave `L` out: strides tell where layers are"
                    } else {
                        "the letters are K (key|value), B (blocks), H (heads), N (tokens), C (content)"
                    }));
                }
            };
            if axes.contains(&axis) {
                return Err(refuse(format!("axes `{text}` have `{}` twice", axis.letter())));
            }
            axes.push(axis);
        }
        for needed in [Self::Block, Self::Content] {
            if !axes.contains(&needed) {
                return Err(refuse(format!("axes `{text}` lack `{}`", needed.letter())));
            }
        }
        Ok(axes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_come_back() {
        for text in ["BHNC", "KBNHC", "BNC", "BC", "CNHBK"] {
            let axes = Axis::parse_all(text).unwrap();
            assert_eq!(axes.iter().map(|axis| axis.letter()).collect::<String>(), text);
        }
        assert_eq!(Axis::parse_all("BHND").unwrap(), Axis::parse_all("BHNC").unwrap());
    }

    #[test]
    fn bad_letters_are_named() {
        for (text, part) in [
            ("BXC", "`X`"),
            ("BHHC", "`H` twice"),
            ("HNC", "lack `B`"),
            ("BH", "lack `C`"),
            ("", "lack"),
        ] {
            let error = Axis::parse_all(text).unwrap_err();
            assert!(error.message().contains(part), "{error}");
        }
        assert!(
            Axis::parse_all("LBHNC")
                .unwrap_err()
                .hint()
                .unwrap()
                .contains("per layer")
        );
    }
}
