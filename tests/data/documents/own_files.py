"""Small documents of each kind, written by commonly used libraries."""

from __future__ import annotations

from pathlib import Path

FILES = Path(__file__).with_name("files")
"""Files that other programs made."""


def write_pdf(path: Path, pages: list[str], title: str = "") -> None:
    """A PDF with one line per page, in a font that every reader has."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources "
            f"<< /Font << /F1 3 0 R >> >> /Contents {5 + 2 * number} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    objects.append(f"<< /Title ({title}) >>")
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R /Info {len(objects)} 0 R >>\n"
    xref = f"xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}startxref\n{len(out)}\n%%EOF\n"
    path.write_bytes((out + xref).encode("latin-1"))


def write_docx(path: Path) -> None:
    import docx

    document = docx.Document()
    document.add_heading("Expenses", level=1)
    document.add_paragraph("Receipts are kept for seven years.")
    document.add_heading("Travel", level=2)
    document.add_paragraph("A train is booked before a flight.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text = "hotel"
    table.rows[0].cells[1].text = "ninety a night"
    document.save(str(path))


def write_folder(folder: Path) -> Path:
    """One document of each kind, two of them in a subfolder."""
    (folder / "guide").mkdir(parents=True)
    (folder / "notes.txt").write_text("The spare key hangs behind the clock.", encoding="utf-8")
    (folder / "guide" / "setup.md").write_text(
        "# Setting up\n\nFirst steps.\n\n## Printer\n\nThe printer listens on port 9100.\n",
        encoding="utf-8",
    )
    (folder / "guide" / "page.html").write_text(
        "<html><head><title>Opening hours</title><script>var x = 1;</script></head><body><article>"
        "<h1>Opening hours</h1><p>The library opens at nine and closes at six on weekdays.</p>"
        "</article></body></html>",
        encoding="utf-8",
    )
    write_pdf(folder / "report.pdf", ["Revenue rose by nine percent.", "Costs fell."], "Report")
    write_docx(folder / "expenses.docx")
    return folder
