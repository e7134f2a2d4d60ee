//! What an image for a GPU says of itself, read without one: its header, and the names of its sections.

/// What ELF calls the machine.
const CUDA: u16 = 190;

/// The architecture that it was made for.
pub(crate) fn arch_of(image: &[u8]) -> u32 {
    let field = |first: usize| &image[first..first + 4];
    assert_eq!(field(0), b"\x7fELF");
    assert_eq!(image[4..6], [2, 1], "not of 64 bits, little endian");
    assert_eq!(u16::from_le_bytes([image[18], image[19]]), CUDA);
    let flags = u32::from_le_bytes(field(48).try_into().unwrap());
    // CUDA 13 raised the version of the ABI and moved the number.
    if image[8] < 8 { flags & 0xff } else { flags >> 8 & 0xff }
}

/// The kernels and functions that it has code of, sorted. Each one's code is a section, named after it.
pub(crate) fn code_of(image: &[u8]) -> Vec<String> {
    let strings = image.split(|&byte| byte == 0);
    let mut names: Vec<_> = strings
        .filter_map(|string| string.strip_prefix(b".text."))
        .map(|name| String::from_utf8(name.to_owned()).unwrap())
        .collect();
    names.sort();
    names.dedup(); // an image may name its sections in two tables
    names
}
